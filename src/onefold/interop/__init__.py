"""The rooms of other libraries' formats. DeepSpeed's names and configuration have their own: `onefold.deepspeed`."""
