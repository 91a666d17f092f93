"""A typical training script, with a DataLoader."""

import resume
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
epochs = 5

points = torch.rand(16384, 2)  # your data
dataset = TensorDataset(points, (points.square().sum(1) < 0.64).long())
loader = DataLoader(dataset, 64, shuffle=True)

# Your model.
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

run = resume.Run(model=model, optimizer=optimizer)
for epoch in run.loop(range(epochs)):
    metrics = run.sums(2, device)
    for inputs, targets in run.loop(loader):
        inputs, targets = inputs.to(device), targets.to(device)
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics[0] += loss.detach() * len(targets)
        metrics[1] += len(targets)
    total, count = metrics
    print(f"Epoch {epoch}: loss {total / count:.4f} over {count:.0f} samples")
    run.write("model.pt", model)
