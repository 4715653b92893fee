"""A model that descends from withdrawn data is not promoted."""

from xray_runtime.kernel.history.promotion_check import PromotionCheck
from xray_runtime.live.withdrawal import refusal

CHECK = PromotionCheck(refusal=refusal)
