"""Scripts that deal with bad numbers themselves, or meet them where nothing is trained."""

from common import F, Net, batches, digest, nn, show, torch


def skips():
    net, skipped = Net(), 0
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(batches()):
        loss = F.mse_loss(net(x), y)
        if torch.isnan(loss):
            skipped += 1
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(step, loss)
    print(skipped, digest(net))


def leaves_out_the_step():
    net, left = nn.Linear(6, 3), 0
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for step, (x, _) in enumerate(batches()):
        loss = (net(x) * x[:, :1]).square().sum(1).sqrt().mean()  # FAULT IN BACKWARD
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
        else:
            left += 1
        show(step, loss)
    print(left, digest(net))


def evaluates():
    net, total = Net().eval(), 0.0
    with torch.no_grad():
        for x, y in batches():
            loss = F.mse_loss(net(x), y)
            total += loss.item()
    print(total)


torch.manual_seed(0)
skips()
leaves_out_the_step()
evaluates()
