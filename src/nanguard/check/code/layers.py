"""Modules of ``torch.nn`` by what calling them does."""

from __future__ import annotations

# The class, and the operation that its forward is.
LAYERS: dict[str, str] = {
    "Softmax": "softmax",
    "Softmax2d": "softmax",
    "Sigmoid": "sigmoid",
    "LogSoftmax": "log_softmax",
    "LogSigmoid": "logsigmoid",
    "Tanh": "tanh",
    "Hardtanh": "hardtanh",
    "ReLU": "relu",
    "ReLU6": "relu6",
    "ELU": "elu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Softplus": "softplus",
    "Softsign": "softsign",
    "Hardsigmoid": "hardsigmoid",
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "KLDivLoss": "kl_div",
    "CTCLoss": "ctc_loss",
    "TripletMarginLoss": "triplet_margin_loss",
    "GaussianNLLLoss": "gaussian_nll_loss",
    "CosineSimilarity": "cosine_similarity",
    "PairwiseDistance": "pairwise_distance",
    "Flatten": "flatten",
    "Unflatten": "unflatten",
    "Identity": "view",
    "Dropout": "view",
}
RECURRENT = frozenset({"RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"})
