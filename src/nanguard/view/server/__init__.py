"""``nanguard serve``: the pages about all runs below a folder, live.

``folder`` finds runs and keeps to the folder, ``digest`` and ``spark`` keep the little that the
overview shows of each, ``index`` looks after all of them in a thread, ``desk`` opens the few that
somebody looks at. ``gate`` decides who may ask, ``app`` what is answered, ``running`` starts it.
Nothing is ever written.
"""
