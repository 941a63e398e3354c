import torch
from torch import nn
import torch.nn.functional as F


class GATLayer(nn.Module):
    def __init__(self, d_in, d_out, heads=4, slope=0.2):
        super().__init__()
        self.heads, self.d_out = heads, d_out
        self.W = nn.Parameter(torch.Tensor(d_in, heads * d_out))
        self.a_src = nn.Parameter(torch.Tensor(heads, d_out))
        self.a_dst = nn.Parameter(torch.Tensor(heads, d_out))
        self.bias = nn.Parameter(torch.Tensor(heads * d_out))
        self.act = nn.LeakyReLU(slope)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.xavier_uniform_(self.W)
        nn.init.xavier_uniform_(self.a_src)
        nn.init.xavier_uniform_(self.a_dst)

    def forward(self, x, adj):
        n = x.size(0)
        h = (x @ self.W).view(n, self.heads, self.d_out)
        e = (h * self.a_src).sum(-1)[:, None] + (h * self.a_dst).sum(-1)[None]
        e = self.act(e)
        e = torch.where(adj.unsqueeze(-1) > 0, e, torch.full_like(e, float("-inf")))
        alpha = F.softmax(e, dim=1)
        out = torch.einsum("ijh,jhd->ihd", alpha, h)
        return out.reshape(n, -1) + self.bias


def train_step(net, data, opt):
    logp = F.log_softmax(net(data.x, data.adj), dim=-1)
    loss = F.nll_loss(logp[data.train_mask], data.y[data.train_mask])
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()
