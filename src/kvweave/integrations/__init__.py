"""WHERE users are: kvweave under the engines that people run. Each integration needs its engine: import it by name."""
