// Measures an answer's speed, and limits how often it is drawn.

export function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}

// Estimates tokens per second: an event holds about one token.
export class Pace {
  said = "";
  #events = 0;
  #first = 0;

  note(message) {
    const now = performance.now();
    if (!this.#events) this.#first = now;
    this.#events += 1;
    const seconds = (now - this.#first) / 1000;
    if (message.reasoning && !message.content && !message.calls) message.thoughtSeconds = seconds;
    if (seconds > 0.3) this.said = `about ${this.#events} tokens · ${((this.#events - 1) / seconds).toFixed(0)} tokens/s`;
  }
}

// Draws at most once per frame, and spends at most a fifth of the time on it, however long an answer is.
export class Drawing {
  #draw;
  #isAsked = false;
  #hasEnded = false;
  #next = 0;

  constructor(draw) {
    this.#draw = draw;
  }

  ask() {
    if (this.#isAsked) return;
    this.#isAsked = true;
    setTimeout(() => requestAnimationFrame(() => this.#now()), Math.max(0, this.#next - performance.now()));
  }

  end() {
    this.#hasEnded = true;
  }

  #now() {
    this.#isAsked = false;
    if (this.#hasEnded) return;
    const start = performance.now();
    this.#draw();
    const end = performance.now();
    this.#next = end + Math.min(4 * (end - start), 1000);
  }
}
