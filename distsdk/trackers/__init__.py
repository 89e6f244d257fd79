"""Where metrics go besides the run folder: `base` is the five-call protocol, one file a tracker."""
