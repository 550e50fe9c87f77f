"""The door for Tensorpack: its programs run on TensorFlow 2 and on trainer_kit's engine.

`from tensorpack import *` becomes `from trainer_kit.compat.tensorpack import *`, and `import
tensorflow as tf` becomes `from trainer_kit.compat.tensorpack import tfv1 as tf`. The rest of a
program stays. See docs/guides/from_tensorpack.md.
"""

from __future__ import annotations

import importlib
import sys

from trainer_kit.compat.tensorpack.installed_package import (
    collect_no_garbage,
    export_names,
    extend_path,
    hide_packages,
    keep_logger_folders,
    original_name,
    restore_old_names,
)

__path__ = extend_path(__path__)
__version__ = "0.11"
__git_version__ = "trainer_kit"

with collect_no_garbage():
    # Keras imports them where they are installed, and only its plots and its wrappers need them.
    with hide_packages("matplotlib", "sklearn"):
        importlib.import_module("tensorflow")

    with original_name(sys.modules[__name__]):
        __all__ = export_names(
            globals(),
            [
                *("utils", "dataflow", "models", "callbacks", "tfutils"),
                *("train", "input_source", "predict", "experiments"),
            ],
        )
        restore_old_names()
        keep_logger_folders()

# By name, since these modules import names of this package.
tfv1 = importlib.import_module(f"{__name__}.tfv1")
importlib.import_module(f"{__name__}.mended_functions").mend_functions()
__all__ += ["tfv1"]
# `from tensorpack import *` brings the modules too.
__all__ += ["callbacks", "compat", "dataflow", "graph_builder", "input_source"]
__all__ += ["models", "predict", "tfutils", "train", "utils"]
