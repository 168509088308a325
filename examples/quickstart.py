"""Teaches a small network handwritten digits, then asks it about digits that it has not seen."""

import numpy as np

import gpunet
from gpunet.data import Batches, load_digits

model = gpunet.Model("digits")
data, label = model.input("data", (64, 1, 8, 8)), model.input("label", (64,), "int32")
hidden = model.relu(model.fc(data, "hidden", 100))
scores = model.fc(hidden, "scores", 10)
_, loss = model.softmax_with_loss(scores, label)
model.add_gradients(loss)
for weight in model.params:  # updates are operators of the same net: weight = 1 weight - 0.3 gradient
    model.net.add("WeightedSum", [weight.name, "one", weight.gradient, "minus_rate"], [weight.name])

ws = gpunet.Workspace(device="cpu", seed=0)
ws.run_once(model.init_net)
ws.feed("one", np.float32([1]))
ws.feed("minus_rate", np.float32([-0.3]))
train = ws.create(model.net)
batches = Batches(*load_digits("train"), batch_size=64, seed=0, wrap=True)
for _ in range(500):
    for name, array in zip((data, label), batches.next_batch(), strict=True):
        ws.feed(name, array)
    ws.run(train)

images, labels = load_digits("test")
ws.feed(data, images)
ws.run_once(model.predict_net(scores))
print(f"right on {np.mean(ws.fetch(scores).argmax(axis=1) == labels):.1%} of {len(labels)} digits")
