"""What names say about values: a loss, labels, a mask, a log-scale."""

from __future__ import annotations

import re

_HINTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (
            "labels",
            r"(labels?|targets?|tgts?|gts?|y|yb|y_true|classes|class_ids?|label_ids|lbls?|ys|cls_ids?)$"
            r"|.*_(labels?|targets?|class_ids?)$|(labels?|target|tgt)_(ids?|idx|batch|flat)$|y_[a-z]+$",
        ),
        (
            "mask",
            r".*mask.*$|valid|valids|keep|keeps|pad|padding|is_pad|pads|.*_valid|valid_.*|.*_keep"
            r"|present|observed|occ|active|ok|alive|visible|visibility|inside|(is|has)_[a-z]+",
        ),
        (
            "loss",
            r"(loss(es)?|nll|bce|kld?|mse|ce|elbo|objective|cost)$|.*loss$|.*_losses$|loss_.*|l_[a-z]+$"
            r"|(nll|kld?|mse|ce|bce)_[a-z]+$",
        ),
        (
            "logscale",
            r"log_?(var(iance)?|std|sigma|scale|s|sig|alpha|temp(erature)?|tau|gamma|w|weights?|beta"
            r"|kappa|precision|prec|det|ls|rate|lambda|lam|dt)\w*$|.*_log_?(var|std|sigma|scale)$"
            r"|lv$|ls$|d(w|h|wh)$|t(w|h|wh)$|pred_(w|h|wh)$|.*_logvar$|logit_scale$|raw_(scale|std|sigma|var)$|s_log$",
        ),
        (
            "logprob",
            r"(old_|new_|ref_|behaviou?r_|target_|cur_)?log_?(p|prob|probs|ps|pi|q|mu)s?(_\w+)?$|.*_logp(robs?)?$|lp$",
        ),
        (
            "probability",
            r"(probs?|probabilit(y|ies)|likelihoods?|conf(idences?)?)$|.*_probs?$|probs?_.*",
        ),
        (
            "count",
            r"(counts?|cnt|num|n_valid|n_tok(en)?s?|denom(inator)?|degrees?|deg)$|.*_(counts?|cnt)$|num_(valid|tokens?|pos|neg|positives?|items?|labels|masked)$|n_(pos|neg|valid|tokens|masked)$",
        ),
        (
            "maximum",
            r"(row_?)?max(es|imum)?|mx|max_[a-z]+|[a-z]+_max|lse|logsumexp|log_?z|log_?(norm|partition)[a-z]*",
        ),
        (
            "magnitude",
            r"mag(nitudes?)?|spec(trum|trogram)?|power|energy|amp(litudes?)?|psd|mels?|images?|img|rgb|hdr|pixels?|.*_mag|p|q",
        ),
        (
            "distance",
            r"(sq_?|squared_)?dist(ance)?s?(_?(sq|squared|2|mat(rix)?))?|d2|d_sq|dsq|[a-z_]+_dist(ance)?s?(_sq)?",
        ),
        ("logratio", r"log_?(ratios?|rhos?|is_weights?|importance(_weights?)?)(_[a-z]+)?"),
        (
            "weights",
            r"(weights?|sample_weights?|wts?|ws?|adj(acency)?|affinit(y|ies))$|.*_weights?$",
        ),
        (
            "eps",
            r"(_?eps(ilon)?|tiny|smooth(ing)?|delta|EPS(ILON)?|TINY|.*_eps|eps_.*|_EPS|.*_EPS|laplace|floor|min_(norm|std|var|denom|scale))$",
        ),
        ("gradnorm", r"(g(rad(ient)?)?_?norm|total_norm|norm|gnorm|gn|.*grad_norm)$"),
        (
            "logits",
            r"(logits?|.*_logits?|logits_.*|scores?|.*_scores?|attn(_weights|_scores|_logits)?|att|sim(s|ilarity)?|energy|.*_sim)$",
        ),
        (
            "network",
            r"(model|net|network|module|encoder|decoder|backbone|policy|actor|critic|generator|discriminator|student|teacher|unet|transformer|vae|classifier|head|G|D|netG|netD|.*_(model|net|network|head))$",
        ),
    )
)
_CACHE: dict[str, frozenset[str]] = {}
# Greek letters as people spell them in Latin ones.
_GREEK = str.maketrans(
    {0x3C3: "sigma", 0x3BC: "mu", 0x3C0: "pi", 0x3B1: "alpha", 0x3B2: "beta", 0x3B3: "gamma",
     0x3C4: "tau", 0x3BB: "lambda", 0x3B5: "eps", 0x3F5: "eps", 0x3BA: "kappa", 0x3B4: "delta",
     0x3C1: "rho"}
)  # fmt: skip


def kinds_of(name: str) -> frozenset[str]:
    """Returns what a name says about the value it is given to."""
    known = _CACHE.get(name)
    if known is None:
        lower = name if name.isupper() and len(name) == 1 else name.lower()
        lower = lower if lower.isascii() else lower.translate(_GREEK)
        known = frozenset(kind for kind, pattern in _HINTS if pattern.fullmatch(lower))
        if len(_CACHE) < 50_000:
            _CACHE[name] = known
    return known
