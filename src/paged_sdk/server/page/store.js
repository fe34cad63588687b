// Stores conversations in the browser, in IndexedDB, because images exceed the limit of localStorage.

const NAME = "paged-sdk-chat";
const TABLE = "conversations";

// Returns a store; if the browser stores nothing, one whose `isForgetful` is true.
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

  // Called when another tab has changed something.
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

// Replaces the store if the browser stores nothing, as in some private windows. Conversations last until the page
// closes.
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

// Waits for the transaction: a full disk may raise only there, after the request has succeeded.
function written({ transaction }) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
}

// Small settings by name. Browsers that store nothing throw on any access to localStorage.
export function remember(name, value, isForTab = false) {
  try {
    (isForTab ? sessionStorage : localStorage).setItem(`paged-sdk-${name}`, value);
  } catch {
    // the setting lasts until the page closes
  }
}

export function remembered(name, isForTab = false) {
  try {
    return (isForTab ? sessionStorage : localStorage).getItem(`paged-sdk-${name}`);
  } catch {
    return null;
  }
}
