import torch
import torch.nn as nn
import whisper


class Adapter(nn.Module):
    def __init__(self, d, r=32):
        super().__init__()
        self.down, self.up = nn.Linear(d, r), nn.Linear(r, d)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return x + self.up(torch.relu(self.down(x)))


def build(size="small"):
    model = whisper.load_model(size, device="cuda")
    model.requires_grad_(False)
    d = model.dims.n_audio_state
    adapters = nn.ModuleList(Adapter(d) for _ in range(4)).cuda()
    return model.half(), adapters


def train(dataset, tokenizer, steps=4000):
    model, adapters = build()
    optim = torch.optim.AdamW(adapters.half().parameters(), lr=1e-4, eps=1e-9)
    for step in range(steps):
        mel, ids = dataset.sample(8)
        with torch.no_grad():
            feats = model.encoder(mel.cuda().half())
        for ad in adapters:
            feats = ad(feats)
        logits = model.decoder(ids[:, :-1].cuda(), feats).float()
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:].cuda(), ignore_index=tokenizer.eot)
        optim.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(adapters.parameters(), 1.0)
        optim.step()
        if step % 100 == 0:
            print(step, round(loss.item(), 4))
    torch.save(adapters.state_dict(), "adapters.pt")
