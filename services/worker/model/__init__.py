"""What a model's files say of it: its architecture, its sizes, its LoRAs; and the card that tells clients. May import
contracts."""
