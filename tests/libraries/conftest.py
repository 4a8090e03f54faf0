"""What a test starts by itself, with Triton's interpreter, isn't collected: importing it would set that up here."""

collect_ignore = ["liger_on_cpu.py", "triton_on_cpu.py"]
