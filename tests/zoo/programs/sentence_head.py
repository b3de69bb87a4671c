"""sentence-transformers: pairs of sentences, and a classifier that lives in the loss, not in the model."""

import argparse
import json
import os
import random

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import SoftmaxLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

import diloco_worker  # diloco


def pairs(count, chance):
    """Sentences of one topic or of two: eight topics with eight words each, and noise."""
    topics = [[f"w{8 * topic + i}" for i in range(8)] for topic in range(8)]
    left, right, same = [], [], []
    for _ in range(count):
        a, b = chance.randrange(8), chance.randrange(8)
        same.append(int(chance.random() < 0.5))
        for sentences, topic in ((left, a), (right, a if same[-1] else b)):
            sentences.append(" ".join(chance.choice(topics[topic if i % 2 else chance.randrange(8)]) for i in range(8)))
    return [left, right], torch.tensor(same)


def make_model():
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)} | {"?": 64}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    model = SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=32)], device="cpu")
    return SoftmaxLoss(model, embedding_dimension=32, num_labels=2)


def loss_of(loss, count, chance):
    sentences, labels = pairs(count, chance)
    features = [loss.model.preprocess(side) for side in sentences]
    return loss(features, labels)


@torch.no_grad()
def evaluate(loss):
    return loss_of(loss.eval(), 4000, random.Random(1)).item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 600, "batch": 32, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    loss, chance = make_model(), random.Random(2)
    optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-2)
    learner = diloco_worker.join(os.environ["SHARDS"], loss, learner_id=os.environ["LEARNER"])  # diloco
    chance = random.Random(learner.seed)  # diloco
    for _ in range(args.steps):
        value = loss_of(loss.train(), args.batch, chance)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        learner.step(samples=args.batch, loss=value)  # diloco
        if learner.done:  # diloco
            break  # diloco
    learner.finish()  # diloco
    print(json.dumps({"loss": evaluate(loss)}))


if __name__ == "__main__":
    main()
