import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer


class RewardModel(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.backbone = AutoModel.from_pretrained(name, torch_dtype=torch.float16)
        self.v = nn.Linear(self.backbone.config.hidden_size, 1, dtype=torch.float16)

    def forward(self, ids, mask):
        h = self.backbone(ids, attention_mask=mask).last_hidden_state
        last = mask.sum(1).sub(1).clamp(min=0)
        return self.v(h[torch.arange(len(h)), last]).squeeze(-1)


def pairwise_loss(chosen, rejected):
    return -torch.log(torch.sigmoid(chosen - rejected)).mean()


def train(name, pairs, steps=2000):
    tok = AutoTokenizer.from_pretrained(name)
    model = RewardModel(name).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=9e-6, eps=1e-8, weight_decay=0.0)
    for step, (good, bad) in zip(range(steps), pairs):
        a = tok(good, return_tensors="pt", padding=True).to("cuda")
        b = tok(bad, return_tensors="pt", padding=True).to("cuda")
        r_a = model(a["input_ids"], a["attention_mask"])
        r_b = model(b["input_ids"], b["attention_mask"])
        loss = pairwise_loss(r_a.float(), r_b.float())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 50 == 0:
            acc = (r_a > r_b).float().mean().item()
            print(f"{step} loss={loss.item():.4f} acc={acc:.3f}")
