"""A candidate that had a canary beside the champion must have passed it."""

from xray_runtime.lineage.canary import gate
from xray_runtime.lineage.promotion_check import PromotionCheck

CHECK = PromotionCheck(canary_gate=gate)
