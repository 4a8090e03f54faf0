"""What patched models are tried with: adapters, Trainer, quantizers, exporters."""
