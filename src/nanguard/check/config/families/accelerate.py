"""The file that ``accelerate config`` writes and ``accelerate launch`` reads."""

from __future__ import annotations

from nanguard.check.config.families.family import Facts, Family
from nanguard.check.config.names import words

_KNOWN = words(
    "compute_environment distributed_type mixed_precision use_cpu debug num_processes "
    "machine_rank num_machines gpu_ids main_process_ip main_process_port rdzv_backend "
    "same_network main_training_function enable_cpu_affinity deepspeed_config fsdp_config "
    "parallelism_config megatron_lm_config mpirun_config tpu_name tpu_zone tpu_use_cluster "
    "tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config iam_role_name image_uri "
    "profile region base_job_name pytorch_version transformers_version py_version "
    "sagemaker_inputs_file sagemaker_metrics_file additional_args downcast_bf16 "
    "dynamo_backend ipex_config gradient_accumulation_steps ipex xpu fp8_config "
    "use_mps_device deepspeed_hostfile ec2_instance_type"
)


def _matches(facts: Facts) -> bool:
    if "compute_environment" in facts.top:
        return True
    return "distributed_type" in facts.top and len(facts.top & _KNOWN) >= 3


FAMILY = Family(
    name="accelerate",
    order=10,
    matches=_matches,
    known=_KNOWN,
    closed=True,
    partial=True,
    adds={"clip_norm": "gradient_clipping"},
)
