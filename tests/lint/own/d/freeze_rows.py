import torch
from torch import nn
import torch.nn.functional as F


def add_tokens(emb: nn.Embedding, n: int) -> nn.Embedding:
    new = nn.Embedding(emb.num_embeddings + n, emb.embedding_dim)
    with torch.no_grad():
        new.weight[: emb.num_embeddings] = emb.weight
        new.weight[emb.num_embeddings:] = emb.weight.mean(0)
    return new


def textual_inversion(text_encoder, unet, sched, loader, new_ids, lr=5e-4, steps=3000):
    emb = text_encoder.get_input_embeddings()
    opt = torch.optim.AdamW([emb.weight], lr=lr, weight_decay=0.0)
    frozen = torch.ones(emb.num_embeddings, dtype=torch.bool)
    frozen[new_ids] = False
    for step, (latents, ids) in zip(range(steps), loader):
        noise = torch.randn_like(latents)
        t = torch.randint(0, sched.num_train_timesteps, (latents.size(0),), device=latents.device)
        pred = unet(sched.add_noise(latents, noise, t), t, text_encoder(ids)[0]).sample
        loss = F.mse_loss(pred.float(), noise.float())
        opt.zero_grad()
        loss.backward()
        emb.weight.grad[frozen] = 0
        if not torch.isfinite(emb.weight.grad).all():
            opt.zero_grad()
            continue
        opt.step()
        if step % 500 == 0:
            torch.save({"tokens": emb.weight[new_ids].detach().cpu()}, f"embeds_{step}.bin")
