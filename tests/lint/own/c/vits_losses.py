import torch
from torch.nn import functional as F


def feature_loss(fmap_r, fmap_g):
    loss = 0.0
    for dr, dg in zip(fmap_r, fmap_g):
        for r, g in zip(dr, dg):
            loss = loss + F.l1_loss(r.detach().float(), g.float())
    return loss * 2


def discriminator_loss(reals, fakes):
    return sum(((1 - r.float()) ** 2).mean() + (f.float() ** 2).mean() for r, f in zip(reals, fakes))


def kl_loss(z_p, logs_q, m_p, logs_p, z_mask):
    z_p, logs_q, m_p, logs_p = z_p.float(), logs_q.float(), m_p.float(), logs_p.float()
    kl = logs_p - logs_q - 0.5
    kl = kl + 0.5 * (z_p - m_p) ** 2 * torch.exp(-2.0 * logs_p)
    return (kl * z_mask).sum() / z_mask.sum()


def generator_step(net_g, net_d, batch, optim_g, mel_fn, c_mel=45.0):
    x, x_len, spec, spec_len, wav = batch
    y_hat, mask, (z_p, m_p, logs_p, logs_q) = net_g(x, x_len, spec, spec_len)
    fr, fg, scores = net_d(wav, y_hat)
    mel = F.l1_loss(mel_fn(wav), mel_fn(y_hat)) * c_mel
    adv = sum(((1 - s.float()) ** 2).mean() for s in scores)
    loss = adv + feature_loss(fr, fg) + mel + kl_loss(z_p, logs_q, m_p, logs_p, mask)
    if not torch.isfinite(loss):
        loss = mel.new_zeros((), requires_grad=True)
    optim_g.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net_g.parameters(), 10.0)
    optim_g.step()
    return loss.item()
