"""Train a small convolutional network on two workers, and use what comes back.

`train` is written as if there were one process: a model, an optimizer, two loaders, a loop. The decorator makes a call
of it run on two workers. Each worker gets its half of every epoch, the gradients are averaged over the workers, and
the weights stay the same on all of them. The test loader is read under `torch.no_grad()`: each worker sees all of it.

`distsdk.report` sends numbers to the line that is rewritten while the run goes on, and saves a checkpoint.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import distsdk
from distsdk import distributed


class Net(nn.Module):
    """Two convolutions and a linear layer, for grey images of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classify = nn.Linear(64 * 2 * 2, 10)

    def forward(self, images):
        return self.classify(self.features(images).flatten(1))


@distributed(workers=2, seed=1)
def train(train_set, test_set, epochs):
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=256)
    for epoch in range(epochs):
        model.train()
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in test_loader)
        metrics = {"loss": loss.item(), "accuracy": right / len(test_set)}
        distsdk.report(metrics, checkpoint={"model": model, "epoch": epoch})


images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
train_set, test_set = random_split(digits, [1437, 360], torch.Generator().manual_seed(0))

result = train(train_set, test_set, epochs=20)

print(f"trained on {len(train_set)} digits in {result.timings['run']:.1f} s, on {len(result.ranks)} workers")
print(f"metrics over all workers: loss {result.metrics['loss']:.4f}, test accuracy {result.metrics['accuracy']:.1%}")
print(f"run folder: {result.path}")

model = result.load_into(Net()).eval()  # a new model, with the weights of the last checkpoint
some_images, some_labels = next(iter(DataLoader(test_set, batch_size=10)))
print(f"test digits:   {some_labels.tolist()}")
print(f"classified as: {model(some_images).argmax(1).tolist()}")
