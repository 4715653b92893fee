"""One module a plug: `PAGES`, its routes and their places in the navigation. Other packages: `xray.pages`."""
