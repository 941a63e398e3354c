import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "mistralai/Mistral-7B-v0.3"
tok = AutoTokenizer.from_pretrained(name)
base = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16, device_map={"": 0})
base.gradient_checkpointing_enable()
model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
for p in model.parameters():
    if p.requires_grad:
        p.data = p.data.float()

trainable = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.AdamW(trainable, lr=2e-4, eps=1e-8)


class Judge(nn.Module):
    """Frozen fp16 scorer, only ever used without gradients."""

    def __init__(self, d):
        super().__init__()
        self.fc = nn.Linear(d, 1)

    @torch.no_grad()
    def forward(self, h):
        return self.fc(h.half()).float().squeeze(-1)


judge = Judge(4096).half().cuda().eval()


def train(batches, max_norm=0.3):
    model.train()
    for step, batch in enumerate(batches):
        out = model(**batch, output_hidden_states=True)
        opt.zero_grad(set_to_none=True)
        out.loss.backward()
        norm = nn.utils.clip_grad_norm_(trainable, max_norm)
        if torch.isfinite(norm):
            opt.step()
        if step % 20 == 0:
            print(step, out.loss.item(), norm.item(), judge(out.hidden_states[-1][:, -1]).mean().item())
