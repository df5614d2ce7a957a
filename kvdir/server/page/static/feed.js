// The stream of pictures. A picture stands alone, so nothing is asked for again after a break. A tab that nobody sees hears nothing.

const FIRST_RETRY_MS = 1000;
const LAST_RETRY_MS = 10000;
const SILENT_MS = 45000; // longer than the slowest coordinator takes between two pictures; a way that is cut says nothing

export class Feed {
  // on: {picture, history, stuck, state}; state is "live", "lost" or "hidden", with words.
  constructor(url, on) {
    this.url = url;
    this.on = on;
    this.source = null;
    this.retryMs = FIRST_RETRY_MS;
    this.timer = 0;
    this.heardMs = 0;
    setInterval(() => this.source && Date.now() - this.heardMs > SILENT_MS && this.again(), FIRST_RETRY_MS);
    document.addEventListener("visibilitychange", () => this.look());
    this.look();
  }

  look() {
    if (document.hidden) this.close("hidden", "paused while this tab is hidden");
    else if (!this.source) this.open();
  }

  open() {
    clearTimeout(this.timer);
    const source = new EventSource(this.url);
    this.source = source;
    this.heardMs = Date.now();
    source.addEventListener("picture", (event) => {
      this.retryMs = FIRST_RETRY_MS;
      this.heardMs = Date.now();
      this.on.picture(JSON.parse(event.data));
    });
    source.addEventListener("history", (event) => this.on.history(JSON.parse(event.data)));
    source.addEventListener("stuck", (event) => {
      this.heardMs = Date.now();
      this.on.stuck(JSON.parse(event.data).words);
    });
    source.addEventListener("error", () => {
      if (this.source === source) this.again();
    });
  }

  again() {
    this.close("lost", "connection lost");
    this.timer = setTimeout(() => this.look(), this.retryMs);
    this.retryMs = Math.min(2 * this.retryMs, LAST_RETRY_MS);
    this.why();
  }

  // EventSource does not say why it was refused.
  async why() {
    try {
      const answer = await fetch(this.url, { method: "HEAD" });
      if (answer.status === 503) this.on.state("lost", "too many windows watch this page already: close one of them");
      else if (!answer.ok) this.on.state("lost", `the coordinator refuses: HTTP ${answer.status}`);
    } catch {
      // nobody is there: that is what the banner says already
    }
  }

  close(state, words) {
    clearTimeout(this.timer);
    if (this.source) this.source.close();
    this.source = null;
    this.on.state(state, words);
  }
}
