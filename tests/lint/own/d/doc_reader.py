import torch
import torch.nn as nn
import torch.nn.functional as F


class BilinearAttn(nn.Module):
    def __init__(self, x_dim, y_dim):
        super().__init__()
        self.linear = nn.Linear(y_dim, x_dim)

    def forward(self, x, y, x_mask):
        """x_mask: 1 for padding"""
        wy = self.linear(y)
        xwy = x.bmm(wy.unsqueeze(2)).squeeze(2)
        xwy.data.masked_fill_(x_mask.data, -float("inf"))
        if self.training:
            return F.log_softmax(xwy, dim=-1)
        return F.softmax(xwy, dim=-1)


class StackedRNN(nn.Module):
    def __init__(self, d, hid, layers=3):
        super().__init__()
        self.rnns = nn.ModuleList(nn.LSTM(d if i == 0 else 2 * hid, hid, bidirectional=True, batch_first=True) for i in range(layers))

    def forward(self, x):
        outs = []
        for rnn in self.rnns:
            x = rnn(F.dropout(x, 0.3, self.training))[0]
            outs.append(x)
        return torch.cat(outs, 2)


def update(model, ex, opt, grad_clipping=10.0):
    start, end = model(*ex[:-2])
    loss = F.nll_loss(start, ex[-2]) + F.nll_loss(end, ex[-1])
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clipping)
    opt.step()
    return loss.item()


def load(path, build):
    saved = torch.load(path, map_location=lambda storage, loc: storage)
    model = build(saved["config"])
    model.load_state_dict(saved["state_dict"])
    return model
