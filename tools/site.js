// Drops words that say nothing from searches: each word also finds all words
// that begin with it, and `I` would find every page about images.
const EMPTY = new Set(
  (
    'a an and are as at be by can do does for from how i in is it my of on or' +
    ' our that the there this to was we what when where which why will with you'
  ).split(' ')
);
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  // A query; others set the search up.
  if (message?.type === 2 && typeof message.data === 'string') {
    const words = message.data.split(/\s+/);
    const kept = words.filter((word) => !EMPTY.has(word.toLowerCase()));
    if (kept.some(Boolean)) message = { ...message, data: kept.join(' ') };
  }
  return post.call(this, message, ...rest);
};
