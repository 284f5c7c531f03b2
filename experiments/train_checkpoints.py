"""Checkpoints of a training run, by orbax: state and data position, atomic, the last few kept."""

import logging
import os
import pathlib
from typing import TypeVar

import jax
import orbax.checkpoint as ocp

State = TypeVar("State")


class TrainCheckpoints:
    """The checkpoints under one directory.

    A checkpoint is written elsewhere and renamed when it is complete, so a kill at any moment
    leaves the one before it.
    """

    def __init__(self, directory: str | os.PathLike, *, keep: int):
        """Opens or creates the directory, and clears what a kill may have left."""
        logging.getLogger("absl").addFilter(_worth_showing)
        self._manager = ocp.CheckpointManager(
            pathlib.Path(directory).absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                # Saving takes tens of milliseconds here; a background save would outlive the step
                # whose metrics it must agree with.
                enable_async_checkpointing=False,
                cleanup_tmp_directories=True,
            ),
        )

    @property
    def latest_step(self) -> int | None:
        """The newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: State, data: dict) -> None:
        """Returns when the checkpoint is complete.

        Args:
          state: A pytree of arrays.
          data: Data position and whatever else is plain JSON.
        """
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data)
        )
        self._manager.save(step, args=arguments, force=True)
        self._manager.wait_until_finished()

    def restore(self, step: int, like: State) -> tuple[State, dict]:
        """Reads a checkpoint into the structure, shapes and dtypes of `like`.

        Args:
          like: The state a fresh run would start from, concrete or abstract: what the files hold
            never decides the structure.
        """
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(target), data=ocp.args.JsonRestore()
        )
        restored = self._manager.restore(step, args=arguments)
        return restored["state"], restored["data"]

    def close(self) -> None:
        """Releases the directory."""
        self._manager.close()

    def __enter__(self) -> "TrainCheckpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def holds_one(directory: str | os.PathLike) -> bool:
    """Whether a complete checkpoint is there; nothing is opened or made."""
    place = pathlib.Path(directory)
    return place.is_dir() and any(path.name.isdecimal() for path in place.iterdir())


def _worth_showing(record: logging.LogRecord) -> bool:
    # orbax tells a dozen lines of every save at level INFO.
    return record.levelno >= logging.WARNING or "/orbax/" not in record.pathname
