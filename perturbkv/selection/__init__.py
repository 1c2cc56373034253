"""From scores to kept sets; one file per eviction system under `policies`."""
