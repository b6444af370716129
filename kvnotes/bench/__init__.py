"""Items that measure kvnotes, and the code that scores them; the scripts are in bench/."""
