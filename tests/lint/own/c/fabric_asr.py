import torch
from lightning.fabric import Fabric
from torch import nn
import torchaudio


class DeepSpeech(nn.Module):
    def __init__(self, n_mels=80, hidden=512, n_tokens=32):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(n_mels, hidden, 11, stride=2, padding=5), nn.BatchNorm1d(hidden), nn.ReLU())
        self.rnn = nn.GRU(hidden, hidden, num_layers=5, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * hidden, n_tokens)

    def forward(self, mel):
        h, _ = self.rnn(self.front(mel).transpose(1, 2))
        return self.fc(h).log_softmax(-1)


def main(train_set, max_epochs=40):
    fabric = Fabric(accelerator="cuda", devices=8, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    model = DeepSpeech()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(train_set, batch_size=16, num_workers=8))
    ctc = nn.CTCLoss(blank=0)
    spec_aug = torchaudio.transforms.FrequencyMasking(27)
    for epoch in range(max_epochs):
        for mel, text, mel_len, text_len in loader:
            optimizer.zero_grad()
            logp = model(spec_aug(mel)).transpose(0, 1)
            loss = ctc(logp, text, mel_len // 2, text_len)
            if torch.isinf(loss) or torch.isnan(loss):
                fabric.print("bad utterance in batch")
                continue
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=5.0)
            optimizer.step()
        fabric.save(f"ds2_{epoch}.ckpt", {"model": model, "optimizer": optimizer})
