"""A model that descends from withdrawn data is not promoted."""

from xray_runtime.lineage.promotion_check import PromotionCheck
from xray_runtime.lineage.withdrawal import refusal

CHECK = PromotionCheck(refusal=refusal)
