"""One module per plug: `PAGES`, its routes and their positions in the navigation. Other packages: `xray.pages`."""
