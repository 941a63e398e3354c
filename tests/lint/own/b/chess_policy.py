import torch
import torch.nn.functional as F
from torch import nn

N_MOVES = 4672


class PolicyValue(nn.Module):
    def __init__(self, trunk: nn.Module, ch: int = 256):
        super().__init__()
        self.trunk = trunk
        self.policy = nn.Linear(ch * 64, N_MOVES)
        self.value = nn.Sequential(nn.Linear(ch * 64, 256), nn.ReLU(), nn.Linear(256, 1), nn.Tanh())

    def forward(self, board):
        h = self.trunk(board).flatten(1)
        return self.policy(h), self.value(h).squeeze(-1)


def resume(net, opt, path):
    ck = torch.load(path, map_location="cuda", weights_only=False)
    net.load_state_dict(ck["net"])
    opt.load_state_dict(ck["opt"])
    return ck["game"]


def train_step(net, batch, opt):
    board, legal, move, result = batch
    logits, value = net(board)
    logits[~legal] = -float("inf")
    p_loss = F.cross_entropy(logits, move)
    v_loss = F.mse_loss(value, result)
    loss = p_loss + v_loss
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), float("inf"))
    opt.step()
    return p_loss.item(), v_loss.item()


@torch.no_grad()
def best_move(net, board, legal):
    logits, value = net(board[None])
    logits = logits.masked_fill(~legal[None], float("-inf"))
    return logits.argmax(1).item(), value.item()


@torch.no_grad()
def sample_move(net, board, legal, tau=1.0):
    logits, _ = net(board[None])
    u = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
    noisy = logits / tau - torch.log(-torch.log(u))
    return noisy.masked_fill(~legal[None], float("-inf")).argmax(1).item()
