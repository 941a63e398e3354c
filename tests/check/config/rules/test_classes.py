"""Each fault in every family, and what looks like it and is healthy."""

from __future__ import annotations

import pytest

from tests.check.config.rules.reading import names

HF = "model_name_or_path: bert-base-cased\noutput_dir: o\nnum_train_epochs: 3\nsave_steps: 500\n"
LIT = "trainer:\n  accelerator: gpu\n  max_epochs: 30\n  gradient_clip_val: 1.0\n"
RUN = "model: {name: vit_small}\noptimizer: {name: adamw, lr: 3.0e-4}\nmax_steps: 20000\n"
CALM = RUN + "warmup_steps: 500\ngrad_clip: 1.0\n"
NET = "model: {name: mlp}\noptimizer: {name: adam, lr: 1.0e-3}\nepochs: 40\n"

FAULTS = [
    ("conflicting-precision", "yaml", HF + "fp16: true\nbf16: true\nlearning_rate: 1.0e-5\n"),
    (
        "conflicting-precision",
        "yaml",
        LIT.replace("gpu", "gpu\n  precision: 32-true") + "bf16: true\n",
    ),
    ("conflicting-precision", "yaml", CALM + "precision: fp32\namp: true\n"),
    ("conflicting-precision", "yaml", CALM + "amp: {enabled: true, dtype: float16}\nbf16: true\n"),
    ("conflicting-precision", "yaml", CALM + "mixed_precision: bf16\nfp16: true\n"),
    ("conflicting-precision", "yaml", CALM + "amp: false\nfp16: true\n"),
    (
        "conflicting-precision",
        "yaml",
        HF + "torch_dtype: bfloat16\nfp16: true\nlearning_rate: 1.0e-5\n",
    ),
    (
        "conflicting-precision",
        "yaml",
        "compute_environment: LOCAL_MACHINE\nmixed_precision: fp16\n"
        "deepspeed_config: {bf16: {enabled: true}}\n",
    ),
    (
        "conflicting-precision",
        "toml",
        'lr = 1e-4\nmax_steps = 9\nprecision = "bf16"\nfp16 = true\n',
    ),
    (
        "fp16-without-loss-scaling",
        "json",
        '{"fp16": {"enabled": true, "loss_scale": 1}, "zero_optimization": {}}',
    ),
    ("fp16-without-loss-scaling", "yaml", LIT + "  precision: 16-true\n"),
    ("fp16-without-loss-scaling", "yaml", CALM + "fp16: true\ngrad_scaler: {enabled: false}\n"),
    ("fp16-without-loss-scaling", "yaml", CALM + "dtype: float16\nloss_scaling: off\n"),
    ("fp16-without-loss-scaling", "yaml", HF + "torch_dtype: float16\nlearning_rate: 1.0e-5\n"),
    ("fp16-without-loss-scaling", "yaml", CALM + "fp16: true\ndynamic_loss_scale: false\n"),
    ("learning-rate-too-high", "yaml", HF + "learning_rate: 0.005\n"),
    (
        "learning-rate-too-high",
        "json",
        '{"base_model": "x-7b", "adapter": "lora", "sequence_len": 9, "learning_rate": 0.02}',
    ),
    ("learning-rate-too-high", "yaml", CALM.replace("3.0e-4", "0.1")),
    ("learning-rate-too-high", "yaml", "optimizer: {name: lion, lr: 0.01}\nepochs: 3\n"),
    (
        "learning-rate-too-high",
        "yaml",
        "optimizer: {name: sgd, lr: 20.0}\nmodel: resnet18\nepochs: 3\n",
    ),
    (
        "learning-rate-too-high",
        "toml",
        'objective = "ddpm"\noptimizer = "adam"\nlr = 0.01\nepochs = 9\n',
    ),
    (
        "learning-rate-too-high",
        "json",
        '{"zero_optimization": {}, "optimizer": {"type": "Adam", "params": {"lr": 0.5}}}',
    ),
    ("scientific-notation-is-string", "yaml", NET + "weight_decay: 1e-4\n"),
    ("scientific-notation-is-string", "yaml", NET + "lrs: [1e-4, 2.0e-4]\n"),
    ("scientific-notation-is-string", "yaml", HF + "learning_rate: 2e-5\n"),
    ("scientific-notation-is-string", "yaml", NET + "eps: 1.0e8\n"),
    ("value-out-of-range", "yaml", NET.replace("1.0e-3", "-1.0e-3")),
    ("value-out-of-range", "yaml", NET + "beta2: 1.0\n"),
    ("value-out-of-range", "yaml", NET + "momentum: 1.2\n"),
    ("value-out-of-range", "yaml", NET + "adam_betas: (0.9, 1.0)\n"),
    ("value-out-of-range", "yaml", NET + "label_smoothing: 1.0\n"),
    ("value-out-of-range", "yaml", NET + "gradient_accumulation_steps: 0\n"),
    ("value-out-of-range", "yaml", NET + "weight_decay: -0.01\n"),
    ("value-out-of-range", "yaml", NET + "attention_dropout: -0.1\n"),
    ("value-out-of-range", "yaml", NET + "warmup_ratio: 5\n"),
    ("value-out-of-range", "yaml", NET + "scheduler: {name: exponential, gamma: 1.1}\n"),
    ("value-out-of-range", "yaml", NET + "batch_size: 0\n"),
    (
        "value-out-of-range",
        "json",
        '{"zero_optimization": {}, "optimizer": {"type": "Adam", "params": {"lr": 1e-4, '
        '"eps": 0}}}',
    ),
    (
        "missing-gradient-clipping",
        "yaml",
        HF + "learning_rate: 1.0e-5\nmax_grad_norm: 0\nfp16: true\n",
    ),
    ("missing-gradient-clipping", "yaml", RUN + "warmup_steps: 500\nbf16: true\n"),
    (
        "missing-gradient-clipping",
        "yaml",
        "model: {type: GRU}\noptimizer: {name: sgd, lr: 0.5}\nepochs: 9\n",
    ),
    ("clip-norm-too-large", "yaml", LIT.replace("1.0", "1.0e+9")),
    ("clip-norm-too-large", "json", '{"zero_optimization": {}, "gradient_clipping": 1e6}'),
    ("clip-norm-too-large", "toml", "lr = 1e-4\nepochs = 9\ngrad_clip = inf\n"),
    ("clip-norm-too-large", "yaml", NET + "clip_grad: {max_norm: 5000}\n"),
    ("conflicting-clipping", "yaml", NET + "train: {clip_grad_norm: 1.0}\nmax_grad_norm: 0.1\n"),
    (
        "conflicting-clipping",
        "yaml",
        HF + "learning_rate: 1.0e-5\nmax_grad_norm: 1.0\n"
        "deepspeed: {gradient_clipping: 0.3, zero_optimization: {stage: 2}}\n",
    ),
    ("no-warmup", "yaml", RUN + "grad_clip: 1.0\nwarmup_steps: 0\n"),
    ("no-warmup", "yaml", RUN + "grad_clip: 1.0\nwarmup_ratio: 0.0\nbf16: true\n"),
    ("no-warmup", "yaml", RUN + "grad_clip: 1.0\nscheduler: {name: cosine, warmup_epochs: 0}\n"),
    ("no-warmup", "yaml", RUN + "grad_clip: 1.0\nbf16: true\n"),
    (
        "warmup-longer-than-training",
        "yaml",
        RUN + "grad_clip: 1.0\nscheduler: {num_warmup_steps: 30000}\n",
    ),
    ("warmup-longer-than-training", "yaml", NET + "warmup_ratio: 1.0\n"),
    (
        "warmup-longer-than-training",
        "json",
        '{"zero_optimization": {}, "scheduler": {"type": "WarmupDecayLR", "params": '
        '{"warmup_max_lr": 1e-4, "warmup_num_steps": 9000, "total_num_steps": 5000}}}',
    ),
    (
        "warmup-longer-than-training",
        "yaml",
        LIT + "  limit_train_batches: 100\nwarmup_steps: 5000\n",
    ),
    ("min-lr-above-lr", "toml", "learning_rate = 1e-4\nmin_lr = 1e-3\nmax_iters = 9\n"),
    ("min-lr-above-lr", "yaml", NET + "scheduler: {name: cosine, eta_min: 0.01}\n"),
    ("min-lr-above-lr", "yaml", NET + "lr_scheduler_kwargs: {min_lr_rate: 10}\n"),
    (
        "min-lr-above-lr",
        "json",
        '{"zero_optimization": {}, "scheduler": {"type": "WarmupLR", "params": '
        '{"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-4, "warmup_num_steps": 10}}}',
    ),
    ("adam-eps-too-small", "yaml", NET + "model_dtype: fp16\nloss_scale: 128\nadam_eps: 1.0e-8\n"),
    (
        "adam-eps-too-small",
        "yaml",
        HF + "learning_rate: 1.0e-5\nfp16: true\nadam_epsilon: 1.0e-12\n",
    ),
    ("batchnorm-batch-too-small", "yaml", NET + "norm_layer: BatchNorm2d\nper_gpu_batch_size: 1\n"),
    (
        "batchnorm-batch-too-small",
        "yaml",
        NET + "norm_cfg: {type: BN}\nglobal_batch_size: 8\nnum_gpus: 8\n",
    ),
    ("num-labels-below-classes", "yaml", "nc: 2\nnames: [a, b, c]\ntrain: x\n"),
    ("num-labels-below-classes", "yaml", "names: {0: a, 1: b, 2: c}\nnc: 2\ntrain: x\n"),
    ("num-labels-below-classes", "yaml", NET + "num_classes: 10\ndata: {num_classes: 100}\n"),
    ("logits-masking-enabled", "yaml", NET + "loss: {mask_logits: true}\n"),
    (
        "logits-masking-enabled",
        "yaml",
        NET + "logits_masking: {enabled: true, mask_value: -.inf}\n",
    ),
    ("checkpoint-interval-too-long", "yaml", CALM + "save_every: 50000\n"),
    ("checkpoint-interval-too-long", "yaml", CALM + "save_strategy: 'no'\n"),
    ("checkpoint-interval-too-long", "yaml", LIT + "  enable_checkpointing: false\n"),
    ("checkpoint-interval-too-long", "yaml", NET + "checkpoint: {every_n_epochs: 100}\n"),
    ("nan-filter-hides-loss", "yaml", HF + "learning_rate: 1.0e-5\nlogging_nan_inf_filter: True\n"),
    ("duplicate-key", "toml", "lr = 1e-4\nepochs = 9\nlr = 1e-5\n"),
    ("duplicate-key", "yaml", "train:\n  lr: 1.0e-4\n  epochs: 3\n  lr: 1.0e-5\n"),
    ("misspelled-key", "yaml", HF + "learning_rate: 1.0e-5\ngradient_accumulation_step: 2\n"),
    ("misspelled-key", "yaml", HF + "learing_rate: 1.0e-5\n"),
    ("misspelled-key", "yaml", NET + "gradient_cliping: 1.0\n"),
    ("misspelled-key", "yaml", LIT.replace("gradient_clip_val", "gradient_clip_vall")),
    ("misspelled-key", "yaml", NET + "schedular: {warmup_steps: 10}\n"),
    (
        "misspelled-key",
        "json",
        '{"zero_optimisation": {"stage": 2}, "train_micro_batch_size_per_gpu": 1, '
        '"gradient_clippng": 1.0}',
    ),
    ("misspelled-key", "toml", "lr = 1e-4\nepochs = 9\nwieght_decay = 0.1\n"),
]

HEALTHY = [
    ("yaml", CALM + "train_flow_lr_mul: 1\n"),
    (
        "yaml",
        "accum_count: [4]\naccum_steps: [0]\nencoder_type: rnn\ndecoder_type: rnn\n"
        "learning_rate: 1e-3\nmax_grad_norm: 5\ntrain_steps: 9000\noptim: adam\n",
    ),
    (
        "yaml",
        "base_model: llama-7b\ntrain: {max_norm: null, lr: 1.0e-5, max_steps: 900}\n"
        "optimizer: AdamW\nprecision: bf16-true\n",
    ),
    (
        "yaml",
        "task: {_name: lm}\noptimizer: {_name: adam}\n"
        "optimization: {lr: [0.0005], clip_norm: 0.0, max_update: 9000}\n"
        "common: {fp16: true}\nlr_scheduler: {_name: inverse_sqrt, warmup_updates: 400}\n",
    ),
    ("yaml", HF + "learning_rate: 3.0e-5\nfp16: true\nwarmup_ratio: 0.1\n"),
    ("yaml", HF + "learning_rate: 3.0e-5\nbf16: auto\nfp16:\ntf32: true\n"),
    (
        "yaml",
        HF + "learning_rate: 2.0e-5\ntorch_dtype: auto\nbf16: true\nbf16_full_eval: true\n"
        "warmup_steps: 10\n",
    ),
    ("yaml", LIT + "  precision: bf16-mixed\n"),
    ("yaml", LIT + "  precision: 16-mixed\n"),
    ("yaml", CALM + "dtype: bfloat16\namp: false\n"),
    ("yaml", CALM + "amp: {enabled: false, dtype: float16}\nbf16: true\n"),
    (
        "yaml",
        CALM
        + "quantization: {dtype: float16}\nbf16: true\neval: {precision: fp32, batch_size: 1}\n",
    ),
    ("yaml", "a: {lr: 1.0e-4, epochs: 3, bf16: true}\nb: {lr: 1.0e-4, epochs: 9, fp16: true}\n"),
    (
        "yaml",
        "stages:\n  - {lr: 1.0e-4, max_steps: 9, min_lr: 1.0e-5}\n  - {lr: 1.0e-6, max_steps: 5}\n",
    ),
    ("json", '{"fp16": {"enabled": true, "loss_scale": 128}, "zero_optimization": {}}'),
    ("yaml", "optimizer: {name: prodigy, lr: 1.0}\nmodel: sdxl\nepochs: 3\n"),
    ("yaml", "optim: noam\nlr: 2.0\nmodel: {name: transformer}\nepochs: 3\ngrad_clip: 5\n"),
    ("yaml", "model: gcn\noptimizer: adam\nlr: 0.01\nepochs: 200\ndropout: 0.5\n"),
    (
        "yaml",
        "adapter: lora\nbase_model: llama-7b\nlearning_rate: 5e-4\nsequence_len: 2048\n"
        "warmup_steps: 10\n",
    ),
    (
        "yaml",
        "peft: prompt_tuning\nmodel_name_or_path: t5-base\nlearning_rate: 0.3\noutput_dir: o\n"
        "num_train_epochs: 3\n",
    ),
    ("yaml", "optimizer: {name: sgd, lr: 30.0}\nmodel: lstm\nclip: 0.25\nepochs: 40\n"),
    ("yaml", "optimizer: {name: lars, lr: 4.8}\nmodel: resnet50\nepochs: 90\n"),
    (
        "yaml",
        "SOLVER:\n  BASE_LR: 2e-2\n  MAX_ITER: 90000\n  WARMUP_ITERS: 1000\n"
        "MODEL: {WEIGHTS: r50}\n",
    ),
    ("yaml", "TRAIN: {BASE_LR: 5e-4, EPOCHS: 300, WARMUP_EPOCHS: 20}\nMODEL: {TYPE: swin}\n"),
    ("yaml", NET + "run_name: 1e5\nnote: 3e4\n"),
    ("yaml", NET + "dropout: 0\nweight_decay: 0\nbatch_size: -1\nloss_weights: [1.0, -1.0]\n"),
    (
        "yaml",
        NET + "patch_size: 16\nmodels: x\nweights: y\nlr_scheduler_type: cosine\nsave_dir: z\n",
    ),
    ("yaml", NET + "norm: {type: SyncBN}\nbatch_size: 1\n"),
    ("yaml", NET + "use_batchnorm: true\nbatch_size: 2\n"),
    ("yaml", NET + "use_batchnorm: false\nbatch_size: 1\n"),
    ("yaml", NET + "use_batchnorm: true\nfreeze_bn: true\nbatch_size: 1\n"),
    ("yaml", NET + "num_classes: 1\ndata: {num_classes: 2}\n"),
    ("yaml", CALM + "save_steps: 0.1\n"),
    ("yaml", CALM + "save_strategy: epoch\nsave_steps: 900000\n"),
    (
        "yaml",
        "CartPole-v1:\n  n_timesteps: !!float 1e5\n  policy: 'MlpPolicy'\n"
        "  learning_rate: lin_0.001\n  n_epochs: 20\n  gamma: 0.98\n",
    ),
    (
        "toml",
        '[optimizer]\nname = "AdamW"\nlr = 8e-4\neps = 1e-8\n[training]\nsteps = 1000\n'
        'max_norm = 1.0\nmixed_precision_param = "bfloat16"\n[lr_scheduler]\nwarmup_steps = 200\n',
    ),
    ("yaml", "services:\n  web:\n    image: x\n    ports: ['80:80']\n"),
    (
        "yaml",
        "name: ci\non: [push]\njobs:\n  build:\n    steps:\n      - uses: a\n      - uses: b\n",
    ),
    (
        "json",
        '{"architectures": ["A"], "hidden_size": 9, "torch_dtype": "float16", '
        '"hidden_dropout_prob": 1.5}',
    ),
    ("json", '{"name": "x", "version": "1", "scripts": {"a": "b"}, "dependencies": {}}'),
    (
        "json",
        '{"log_history": [{"loss": 1.0, "learning_rate": 9.0}], "max_steps": 9, "save_steps": 900}',
    ),
    ("toml", "[build-system]\nrequires = []\n[tool.x]\nlr = 9.0\nepochs = 3\n"),
]


@pytest.mark.parametrize(("rule", "ending", "text"), FAULTS)
def test_a_fault_is_found_in_every_family_and_nothing_else(
    rule: str, ending: str, text: str
) -> None:
    assert names(**{f"run__{ending}": text}) == {rule}


@pytest.mark.parametrize(("ending", "text"), HEALTHY)
def test_what_is_healthy_stays_silent(ending: str, text: str) -> None:
    assert names(**{f"run__{ending}": text}) == set()
