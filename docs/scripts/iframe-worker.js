// Lets the site search when it is opened from disk, where browsers start no workers: the theme's search worker runs in a
// hidden frame. The theme's plugin `offline` would load such a script from a CDN.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const worker = new URL(url, document.baseURI);
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const page = this.frame.contentWindow;
      const load = (address) =>
        new Promise((loaded) => {
          const script = page.document.createElement("script");
          script.onload = loaded;
          script.src = new URL(address, worker);
          page.document.body.appendChild(script);
        });
      page.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      page.importScripts = (...addresses) =>
        addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve());
      this.ready = load(worker);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
