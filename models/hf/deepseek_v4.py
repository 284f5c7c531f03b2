"""DeepSeek-V4 directories. Further-token heads (`mtp.*`) are left out: this model has none."""

from models.config import DecoderConfig
from models.hf.deepseek_v4_config import parse, write
from models.hf.deepseek_v4_names import canonical, layouts
from models.hf.family import Family


def left_out(config: DecoderConfig, name: str) -> bool:
    """Whether the tensor is of a further-token head."""
    return name.removeprefix("model.").startswith("mtp.")


FAMILY = Family(parse, write, layouts, canonical, left_out)
load, save, state_dict = FAMILY.load, FAMILY.save, FAMILY.state_dict
