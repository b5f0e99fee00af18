-- The store's clock.
return NOW
