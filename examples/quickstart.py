"""Teaches a small network handwritten digits, then asks it about digits that it has not seen."""

import gpunet
from gpunet.data import Batches, load_digits
from gpunet.optimizers import SGD

model = gpunet.Model("digits")
data, label = model.input("data", (64, 1, 8, 8)), model.input("label", (64,), "int32")
hidden = model.relu(model.fc(data, "hidden", 100))
scores = model.fc(hidden, "scores", 10)
_, loss = model.softmax_with_loss(scores, label)
model.add_gradients(loss)  # the backward pass and the updates are operators of the same net
SGD(learning_rate=0.1, momentum=0.9).apply(model)

ws = gpunet.Workspace(device="cpu")
ws.run_once(model.init_net)
train = ws.create(model.net)
batches = Batches(*load_digits("train"), batch_size=64, seed=0, wrap=True)
for _ in range(300):
    for name, array in zip((data, label), batches.next_batch(), strict=True):
        ws.feed(name, array)
    ws.run(train)

images, labels = load_digits("test")
ws.feed(data, images)
ws.run_once(model.predict_net(scores))
print(f"right on {(ws.fetch(scores).argmax(axis=1) == labels).mean():.1%} of {len(labels)} digits")
