import torch
from torch import nn


class PromptLearner(nn.Module):
    """Learned context vectors in front of the class names."""

    def __init__(self, clip_model, class_tokens, n_ctx: int = 16, ctx_init: str = ""):
        super().__init__()
        dim = clip_model.ln_final.weight.shape[0]
        if ctx_init:
            with torch.no_grad():
                emb = clip_model.token_embedding(class_tokens[:1])
            vectors = emb[0, 1:1 + n_ctx, :]
        else:
            vectors = torch.empty(n_ctx, dim)
            nn.init.normal_(vectors, std=0.02)
        self.ctx = nn.Parameter(vectors)
        self.cls_shift = nn.Parameter(torch.empty(len(class_tokens), dim))
        self.register_buffer("tokens", class_tokens)

    def forward(self, embed):
        e = embed(self.tokens)
        n = e.size(0)
        ctx = self.ctx.unsqueeze(0).expand(n, -1, -1) + self.cls_shift.unsqueeze(1)
        return torch.cat([e[:, :1], ctx, e[:, 1 + ctx.size(1):]], dim=1)


class CoOp(nn.Module):
    def __init__(self, clip_model, class_tokens):
        super().__init__()
        self.visual, self.text = clip_model.visual, clip_model.encode_embeds
        self.prompts = PromptLearner(clip_model, class_tokens)
        self.embed = clip_model.token_embedding
        self.scale = 100.0

    def forward(self, image):
        img = self.visual(image)
        txt = self.text(self.prompts(self.embed))
        img = img / img.norm(dim=-1, keepdim=True)
        txt = txt / txt.norm(dim=-1, keepdim=True)
        return self.scale * img @ txt.t()
