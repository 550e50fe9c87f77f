"""ModelExporter: writes the predictor of a PredictConfig for use without trainer_kit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.compat.tensorpack.predict.base import OfflinePredictor
from trainer_kit.compat.tensorpack.predict.config import PredictConfig
from trainer_kit.compat.tensorpack.program_graph import get_program_graph
from trainer_kit.compat.tensorpack.utils import logger
from trainer_kit.errors import UsageError
from trainer_kit.runtime.tensorflow_internals import freeze_function

__all__ = ["ModelExporter"]

_v1 = tf.compat.v1


class ModelExporter:
    """Writes a predictor to files that need no code of the program.

    The files contain the variables as constants, and have at most 2 GB.

    Args:
      config: Describes the predictor.
    """

    def __init__(self, config: PredictConfig) -> None:
        self.config = config

    def export_compact(
        self, filename: str, optimize: bool = True, toco_compatible: bool = False
    ) -> None:
        """Writes a GraphDef, with the names of the program's tensors. Runs on the host.

        Args:
          filename: The file.
          optimize: Not used: only what the outputs depend on is written.
          toco_compatible: Not used.
        """
        graph_def, _, _ = self._freeze()
        with tf.io.gfile.GFile(filename, "wb") as file:
            file.write(graph_def.SerializeToString())
        logger.info(f"Output graph written to {filename}.")

    def export_serving(
        self,
        filename: str,
        tags: Sequence[str] | None = None,
        signature_name: str = "prediction_pipeline",
    ) -> None:
        """Writes a SavedModel with one signature, for TensorFlow Serving. Runs on the host.

        Args:
          filename: The folder, which does not exist yet.
          tags: The tags. None: `serve`.
          signature_name: The name of the signature. Its keys are the names of the tensors.
        """
        graph_def, inputs, outputs = self._freeze()
        utils = _v1.saved_model.utils
        with tf.Graph().as_default() as graph, _v1.Session() as session:
            tf.graph_util.import_graph_def(graph_def, name="")

            def describe_tensors(names: Sequence[str]) -> dict[str, Any]:
                tensors = [graph.get_tensor_by_name(name) for name in names]
                return {tensor.name: utils.build_tensor_info(tensor) for tensor in tensors}

            signature = _v1.saved_model.build_signature_def(
                describe_tensors(inputs),
                describe_tensors(outputs),
                tf.saved_model.PREDICT_METHOD_NAME,
            )
            builder = _v1.saved_model.Builder(filename)
            builder.add_meta_graph_and_variables(
                session, list(tags or (tf.saved_model.SERVING,)), {signature_name: signature}
            )
            builder.save()
        logger.info(f"SavedModel created at {filename}.")

    def _freeze(self) -> tuple[Any, list[str], list[str]]:
        """Returns the GraphDef, and the names of the inputs and outputs."""
        predictor = OfflinePredictor(self.config)
        self.graph = predictor.graph
        inputs = predictor.input_tensors
        outputs = predictor.output_tensors
        program = get_program_graph(self.graph)
        function = program.prune(inputs, outputs)
        operations = [tensor.op.name for tensor in [*inputs, *outputs]]
        variables = list(program.variables.values())
        graph_def = freeze_function(function, variables, operations)
        if any(node.name == program.step_seed.op.name for node in graph_def.node):
            raise UsageError(
                f"the outputs {self.config.output_names} depend on random operations, whose seeds"
                " an exported graph does not get; feed the random numbers as an input"
            )
        input_names = [tensor.name for tensor in inputs]
        output_names = [tensor.name for tensor in outputs]
        return graph_def, input_names, output_names
