"""WHERE users are: kvweave inside other engines. Each integration needs its engine installed: import it by name."""
