// Keeps conversations in the browser. IndexedDB, because images are longer than localStorage takes.

const NAME = "paged-sdk-chat";
const TABLE = "conversations";

// Returns a store; where the browser keeps nothing, one whose `isForgetful` is true.
export async function openStore() {
  try {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(TABLE, { keyPath: "id" });
    const database = await done(asked);
    database.onversionchange = () => database.close();
    return new Store(database);
  } catch {
    return new Forgetful();
  }
}

class Store {
  isForgetful = false;
  #database;
  #others = new BroadcastChannel(NAME);

  constructor(database) {
    this.#database = database;
  }

  // Is called when another tab has changed something.
  set changedElsewhere(call) {
    this.#others.onmessage = call;
  }

  async all() {
    const found = await done(this.#table("readonly").getAll());
    return found.sort((one, other) => other.changed - one.changed);
  }

  async put(conversation) {
    await written(this.#table("readwrite").put(conversation));
    this.#others.postMessage(null);
  }

  async remove(id) {
    await written(this.#table("readwrite").delete(id));
    this.#others.postMessage(null);
  }

  #table(mode) {
    return this.#database.transaction(TABLE, mode).objectStore(TABLE);
  }
}

// Stands in where the browser keeps nothing, in private windows of some: conversations last as long as the page.
class Forgetful {
  isForgetful = true;
  #kept = new Map();

  async all() {
    return [...this.#kept.values()];
  }

  async put(conversation) {
    this.#kept.set(conversation.id, conversation);
  }

  async remove(id) {
    this.#kept.delete(id);
  }
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

// A full disk may show only when all is written, after the request has succeeded.
function written({ transaction }) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
}

// Small settings by name. Browsers that keep nothing throw where these are only looked at.
export function remember(name, value, isForTab = false) {
  try {
    (isForTab ? sessionStorage : localStorage).setItem(`paged-sdk-${name}`, value);
  } catch {
    // it lasts as long as the page
  }
}

export function remembered(name, isForTab = false) {
  try {
    return (isForTab ? sessionStorage : localStorage).getItem(`paged-sdk-${name}`);
  } catch {
    return null;
  }
}
