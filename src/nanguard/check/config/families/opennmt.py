"""OpenNMT-py: flat YAML that becomes command line options, and an fp16 optimizer of its own."""

from __future__ import annotations

from nanguard.check.config.families.family import Facts, Family
from nanguard.check.config.names import words

_OWN = words(
    "accum_count decoder_type encoder_type src_vocab tgt_vocab valid_steps share_vocab "
    "word_vec_size rnn_size transformer_ff save_checkpoint_steps src_subword_model decay_method"
)


def _matches(facts: Facts) -> bool:
    return len(facts.top & _OWN) >= 3


FAMILY = Family(
    name="opennmt",
    order=55,
    matches=_matches,
    keys={("", "model_dtype"): "precision", ("", "accum_steps"): None},
    turns_text_into_numbers=True,
    clips=0.0,
    adds={"clip_norm": "max_grad_norm", "warmup_steps": "warmup_steps"},
)
