#!/usr/bin/env bash
# A stable launch on several GPUs: a classifier of images, sequences or features, counted in
# epochs.
# Level safe, fp32; made by nanguard preset.
#
# Train with detection on, so that no bad step reaches the weights:
#     ./launch_stable.sh
#
# Once it has held, in this order:
#   1. Train 5 epochs and look at the largest gradient norm and at the validation loss.
#   2. If nothing was skipped, raise the learning rate to 1e-4, later to 2e-4.
#   3. Turn on bf16 only after a run in fp32 has held.
#
# Every value can be set from outside: LEARNING_RATE=1e-5 ./launch_stable.sh
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# The training script.
TRAIN="${TRAIN:-train.py}"

# Detection is on: a step whose loss or gradient is not finite is not made, on any rank. skip
# goes on, rollback goes back, stop ends the run.
ON_BAD="${ON_BAD:-rollback}"

# Raise it to 1.0e-4 (level balanced) after a run without a bad step. NaN in epochs 1 to 3: go
# down to 1e-5 or 5e-6. NaN in epochs 10 to 20: 5e-5. Stable but slow: 1e-4. Always stable:
# 2e-4.
LEARNING_RATE="${LEARNING_RATE:-5.0e-5}"

# Warm-up, then a cosine down to the lowest rate: no jump anywhere.
LR_SCHEDULER="${LR_SCHEDULER:-cosine}"

# The rate rises over the first 5 epochs of 50, as AdamW knows nothing of its gradients yet.
# Longer if NaN comes early; never 0 in half precision.
WARMUP_EPOCHS="${WARMUP_EPOCHS:-5}"

# Gradients longer than this are shortened to it. The first rung is 1.0; spikes that get
# through are a reason for 0.5. Lower it when the norm spikes, never switch it off. It does
# not help once a gradient is NaN.
MAX_GRAD_NORM="${MAX_GRAD_NORM:-0.5}"

# Keeps weights from growing until they overflow. 1.0e-4 is mild; raise it if norms of weights
# grow through the whole run.
ADAM_WEIGHT_DECAY="${ADAM_WEIGHT_DECAY:-1.0e-4}"

# Good for fp32 state. 1e-8 is 0 in fp16: weights that are half themselves need 1e-6 or more.
ADAM_EPSILON="${ADAM_EPSILON:-1.0e-8}"

# Keeps the logits of a classifier from growing without end. 0.0 where the labels are soft
# already.
LABEL_SMOOTHING="${LABEL_SMOOTHING:-0.1}"

# How long the run is, in epochs. The schedule ends with it: change the warm-up too when this
# changes a lot.
NUM_TRAIN_EPOCHS="${NUM_TRAIN_EPOCHS:-50}"

# Samples for each device. Out of memory: halve it and double the accumulation. Not below 2
# with BatchNorm.
TRAIN_BATCH_SIZE="${TRAIN_BATCH_SIZE:-32}"

# Micro-batches for each step. 2 to 4 make gradients steadier; divide the loss by it.
GRADIENT_ACCUMULATION_STEPS="${GRADIENT_ACCUMULATION_STEPS:-1}"

# A checkpoint every epoch: what a run that breaks loses at most. Seldomer only if writing
# takes more than a few per cent of the time.
SAVE_EVERY_EPOCHS="${SAVE_EVERY_EPOCHS:-1}"

# A bad step can only be looked into if the run can be repeated.
SEED="${SEED:-42}"

# Faults that can be seen before the run. Remove only what you have read.
nanguard check "$TRAIN" "$here/accelerate_stable.yaml"

# The names of the options are those of most training scripts for Accelerate; change them to
# those of yours. What you add to the command is handed on.
exec nanguard run --on-bad "$ON_BAD" -- \
  accelerate launch --config_file "$here/accelerate_stable.yaml" "$TRAIN" \
  --learning_rate "$LEARNING_RATE" \
  --lr_scheduler "$LR_SCHEDULER" \
  --warmup_epochs "$WARMUP_EPOCHS" \
  --max_grad_norm "$MAX_GRAD_NORM" \
  --adam_weight_decay "$ADAM_WEIGHT_DECAY" \
  --adam_epsilon "$ADAM_EPSILON" \
  --label_smoothing "$LABEL_SMOOTHING" \
  --num_train_epochs "$NUM_TRAIN_EPOCHS" \
  --train_batch_size "$TRAIN_BATCH_SIZE" \
  --gradient_accumulation_steps "$GRADIENT_ACCUMULATION_STEPS" \
  --save_every_epochs "$SAVE_EVERY_EPOCHS" \
  --seed "$SEED" \
  "$@"
