"""A training with Lightning, whose strategies broadcast objects by torch's calls, with and without objcomm under them.

    pip install lightning
    torchrun --nproc-per-node 2 examples/drop_in/with_lightning.py

The trainer broadcasts where to write checkpoints and which of them is best; a callback hands a table from rank 0 to all
ranks in every epoch.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))  # so that it runs without objcomm being installed

import torch
import torch.distributed as dist
from drop_in_timing import compare
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

ROUNDS = int(os.environ.get("ROUNDS", "5"))


class Regression(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Table(Callback):  # type: ignore[misc]
    """Something that rank 0 alone knows and all need: a table of embeddings and what is in it, 8 MiB."""

    def __init__(self) -> None:
        self.tables: list[Any] = []

    def on_train_epoch_start(self, trainer: Any, _: Any) -> None:
        table = None
        if trainer.is_global_zero:
            table = {"rows": torch.arange(2_000_000.0).view(-1, 64), "names": [f"word{i}" for i in range(2000)]}
        self.tables.append(trainer.strategy.broadcast(table, src=0))


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    dist.init_process_group("gloo")  # Lightning takes the one that is there

    def fit() -> Any:
        seed_everything(0, verbose=False)
        x = torch.randn(256, 16)
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        module, table = Regression(), Table()
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                accelerator="cpu",
                devices=int(os.environ["LOCAL_WORLD_SIZE"]),
                strategy="ddp",
                max_epochs=3,
                callbacks=[ModelCheckpoint(folder, monitor="loss", save_top_k=2), table],
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=16))
            best = Path(trainer.checkpoint_callback.best_model_path).name
            dist.barrier()
        return [dict(module.state_dict()), best, table.tables]

    class Strategy:
        """A strategy of Lightning's by itself, without a training around it."""

        def __init__(self) -> None:
            from lightning.pytorch.strategies import DDPStrategy

            self.strategy = DDPStrategy()
            self.rows = torch.arange(2_000_000.0).view(-1, 64)

        def broadcast(self) -> Any:
            return self.strategy.broadcast({"rows": self.rows, "n": 3} if dist.get_rank() == 0 else None)

        def broadcast_path(self) -> Any:
            return self.strategy.broadcast("/a/path/of/a/checkpoint.ckpt" if dist.get_rank() == 0 else None)

    alone = Strategy()
    compare("lightning: Trainer.fit, 3 epochs of 8 steps", fit, ROUNDS)
    compare("lightning: strategy.broadcast, 8 MiB", alone.broadcast, ROUNDS * 3)
    compare("lightning: strategy.broadcast, a path", alone.broadcast_path, ROUNDS * 3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
