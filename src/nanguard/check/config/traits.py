"""What is being trained, as far as names in a configuration tell."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nanguard.check.config.names import role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nanguard.check.config.leaves import Leaf

_LANGUAGE = (
    r"llama|qwen|mistral|mixtral|gemma|falcon|deepseek|starcoder|codegen|(?<![a-z])gpt|bloom"
    r"|(?<![a-z])opt-\d|(?<![a-z])phi-?\d|pythia|internlm|baichuan|chatglm|(?<![a-z])yi-\d|olmo"
    r"|(?<![a-z])llm(?![a-z])|vicuna|alpaca|hymba|cohere|smollm|granite|megatron"
)
_SIGNS: dict[str, re.Pattern[str]] = {
    trait: re.compile(pattern)
    for trait, pattern in {
        "recurrent": r"(?<![a-z])(?:bi)?lstm|(?<![a-z])(?:bi)?gru(?![a-z])|(?<![a-z])c?rnn(?![a-z])"
        r"|tacotron|seq2seq|deepspeech|(?<![a-z])rnnt",
        "language": _LANGUAGE,
        "transformer": _LANGUAGE + r"|bert|electra|deberta|(?<![a-z])m?t5|flan|bart(?![a-z])"
        r"|(?<![a-z])vit(?![a-z])|deit|swin|transformer|conformer|(?<![eun])dit(?![a-z])"
        r"|n_heads?\b|num_heads|attention_heads|wav2vec|whisper|hubert"
        r"|(?<![a-z])attn|beit(?![a-z])|(?<![a-z])mae(?![a-z])|detr(?![a-z])|evoformer",
        "t5": r"(?<![a-z])(?:m|by|flan-?)?t5",
        "diffusion": r"diffusion|ddpm|ddim|(?<![eun])dit(?![a-z])|noise_sched"
        r"|(?<![a-z]_)(?<![a-z])timesteps|train_timesteps|diffusion_steps"
        r"|sdxl|(?<![a-z])flux|latent_diff|beta_schedule|denois|controlnet"
        r"|score_model|pred_(?:x0|noise)",
        "reinforcement": r"(?<![a-z])ppo|(?<![a-z])a2c|(?<![a-z])a3c|dqn|(?<![a-z])sac(?![a-z])"
        r"|(?<![a-z])td3|(?<![a-z])ddpg|gae_lambda|n_timesteps|n_envs|replay_buffer|trpo|dreamer"
        r"|impala|num_envs|mlppolicy|cnnpolicy|exploration_",
        "adversarial": r"generator|discriminator|(?<![a-z])[a-z]{0,7}gan(?![a-z])|adversarial"
        r"|hifigan",
        "graph": r"(?<![a-z])gcn|(?<![a-z])gat(?![a-z])|(?<![a-z])gnn|graphsage"
        r"|(?<![a-z])gin(?![a-z])"
        r"|cora(?![a-z])|pubmed|ogbn",
        "field": r"(?<![a-z])nerf|splatting|instant-?ngp|hash_?grid|tensorf|(?<![a-z])sdf",
        "adapter": r"(?<![a-z])(?:q|ada|dy)?lora|(?<![a-z])dora(?![a-z])|(?<![a-z])peft"
        r"|adapter|(?<![a-z])ia3",
        "prompt": r"prompt_tuning|prefix_tuning|p_tuning|ptuning|virtual_tokens|textual_inversion"
        r"|prefix_tokens|soft_prompt",
        "tuned": r"finetun|fine-tun|fine_tun|instruct|(?<![a-z])sft|(?<![a-z])dpo|(?<![a-z])grpo"
        r"|model_name_or_path|base_model|pretrained_model|from_pretrained|torchtune|dreambooth",
        "convolution": r"resnet|efficientnet|vgg|convnext|mobilenet|(?<![a-z])yolo|densenet|regnet",
        "vision": r"(?<![a-z])vit|swin|deit|beit|(?<![a-z])mae(?![a-z])|image|img_|resolution",
        "distillation": r"distil",
        "quantised": r"load_in_4bit|load_in_8bit|qlora|quantiz|bnb_4bit",
        "noam": r"noam",
    }.items()
}
_BILLIONS = re.compile(r"(?<![a-z\d.])(\d{1,3}(?:[._]\d+)?)\s?b(?![a-z0-9])")
_MILLIONS = re.compile(r"(?<![a-z\d.])[1-4]?\d{2}\s?m(?![a-z0-9])")
_WIDTH = frozenset(
    ["hidden_size", "n_embd", "d_model", "embed_dim", "embedding_size", "hidden_dim", "dim"]
)
_OFF = (None, False, "", "none", "null", "false", 0)


def read_traits(leaves: Iterable[Leaf]) -> frozenset[str]:
    """Returns what is being trained, in words such as ``transformer`` or ``adapter``."""
    found: set[str] = set()
    words: set[str] = set()
    for leaf in leaves:
        if role(leaf.sections) == "aside":
            continue
        value = leaf.node.value if leaf.node.kind == "scalar" else "list"
        if value in _OFF and not isinstance(value, float):
            continue  # a thing that is switched off or left empty says nothing
        words.update(leaf.sections)
        words.add(leaf.key)
        if isinstance(value, str) and len(value) <= 200 and role(leaf.sections) != "data":
            words.add(value.lower())
        if isinstance(value, (int, float)) and leaf.key in _WIDTH and value >= 2048:
            found.add("large")
        if leaf.key == "pretrained" and value:
            found.add("tuned")
    text = "\n".join(sorted(words))
    found.update(trait for trait, sign in _SIGNS.items() if sign.search(text))
    if any(float(size.replace("_", ".")) >= 1 for size in _BILLIONS.findall(text)):
        found.add("large")
    elif _MILLIONS.search(text):
        found.add("small")
    return frozenset(found)
