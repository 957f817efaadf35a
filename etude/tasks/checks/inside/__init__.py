"""Programs that run in pods. They use only the standard library; `etude.pods.payload` ships them."""
