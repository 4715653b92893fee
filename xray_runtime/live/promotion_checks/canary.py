"""A candidate that had a canary beside the champion must have passed it."""

from xray_runtime.kernel.history.promotion_check import PromotionCheck
from xray_runtime.live.canary import gate

CHECK = PromotionCheck(canary_gate=gate)
