"""The rooms for those who come from, or go to, other libraries. DeepSpeed's facade has its own: `onefold.deepspeed`."""
