"""Files as rules read them: parsed once, without an opinion."""
