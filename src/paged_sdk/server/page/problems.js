// Explains errors in words, with what can be done about them.

// Returns { title, text, next }: `next` is "wait" (retry later), "watch" (poll until the server is back), "key",
// "models" (reload the list of models), or null.
export function problem(error) {
  const said = sentence(error.message);
  if (error.code === "unavailable" || error.status === 503) {
    const isEnding = /ending/.test(error.message);
    return isEnding
      ? { title: "The server is shutting down.", text: "It takes no new messages. The page goes on when it is back.", next: "watch" }
      : { title: "The model has stopped.", text: `${said} The server has to be started again; the page goes on then.`, next: "watch" };
  }
  switch (error.status) {
    case undefined: // no response
      return { title: "The connection to the server was lost.", text: "It may have been stopped, or the network is down. What was said so far is kept.", next: "watch" };
    case 401:
      return { title: "The server needs a key.", text: "Type one that it knows, and try again.", next: "key" };
    case 404:
      return { title: "This model is not there any more.", text: "Choose another one at the top.", next: "models" };
    case 413:
      return { title: "The message is too long for the server.", text: "Leave out images, or begin a new conversation.", next: null };
    case 429:
      return { title: "The server is busy.", text: "Others are waiting too: its queue is full. Try again in a moment.", next: "wait" };
    case 502:
    case 504:
      return { title: "The answer took too long.", text: said, next: null };
    default:
      break;
  }
  if (error.code === "context_length_exceeded") {
    return { title: "The conversation is longer than the model can read.", text: `${said} Begin a new conversation, or edit an earlier message.`, next: null };
  }
  if (error.code === "timeout") return { title: "The answer took longer than the server allows.", text: "What came until then is kept.", next: null };
  if (error.status === 400) return { title: "The server refuses this message.", text: said, next: null };
  return { title: "The server failed.", text: said, next: null };
}

function sentence(text) {
  const whole = text.trim();
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

// Seconds until the next try: the larger of Retry-After and an exponential backoff, at most 30.
export function patience(error, attempt) {
  return Math.min(30, Math.max(error.retryAfter ?? 1, 2 ** attempt));
}
