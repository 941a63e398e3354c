import faiss
import numpy as np
import torch
from torch.utils.data import DataLoader

from encoder import PassageEncoder


def load_encoder(path: str, device="cuda"):
    enc = PassageEncoder()
    state = torch.load(path, map_location="cpu")
    enc.load_state_dict({k.removeprefix("module."): v for k, v in state.items()})
    return enc.to(device).half().eval()


@torch.inference_mode()
def embed(enc, loader: DataLoader, device="cuda") -> np.ndarray:
    out = []
    for ids, mask in loader:
        h = enc(ids.to(device), mask.to(device)).half()
        h = h / (h.norm(dim=-1, keepdim=True) + 1e-8)
        out.append(h.float().cpu().numpy())
    return np.concatenate(out)


@torch.inference_mode()
def embed_queries(enc, ids, mask):
    h = enc(ids.cuda(), mask.cuda()).float()
    return (h / (h.norm(dim=-1, keepdim=True) + 1e-8)).cpu().numpy()


def build(vectors: np.ndarray, path: str):
    index = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 200
    index.add(vectors)
    faiss.write_index(index, path)


def search(index, q: np.ndarray, k: int = 10):
    scores, ids = index.search(q, k)
    scores = (scores - scores.min(1, keepdims=True)) / (np.ptp(scores, axis=1)[:, None] + 1e-9)
    return scores, ids
