import sys
import torch
from torch import nn, Tensor


class CrossEncoder(nn.Module):
    def __init__(self, vocab: int = 30522, d: int = 384, heads: int = 12, depth: int = 6):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.q = nn.Linear(d, d)
        layer = nn.TransformerEncoderLayer(d, heads, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, depth)
        self.score = nn.Linear(d, 1)

    def forward(self, ids: Tensor) -> Tensor:
        pad = ids == 0
        h = self.enc(self.emb(ids), src_key_padding_mask=pad)
        a = self.score(self.q(h)).squeeze(-1)
        a = a.masked_fill(pad, -1e10)
        return (a.softmax(-1).unsqueeze(-1) * h).sum(1)


def load(path: str) -> CrossEncoder:
    net = CrossEncoder()
    ckpt = torch.load(path, map_location="cpu")
    net.load_state_dict(ckpt["model"])
    return net.half().cuda().eval()


@torch.inference_mode()
def rerank(net: CrossEncoder, query: Tensor, docs: Tensor, k: int = 10):
    q, d = net(query.cuda()), net(docs.cuda())
    q, d = q.float(), d.float()
    s = (d @ q.t()).squeeze(1) / (d.norm(dim=1) * q.norm() + 1e-8)
    return s.topk(min(k, len(s)))


if __name__ == "__main__":
    model = load(sys.argv[1])
    print(sum(p.numel() for p in model.parameters()) / 1e6, "M parameters")
